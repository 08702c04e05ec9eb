"""The objectives of training: policy gradient and supervised fine-tuning."""
