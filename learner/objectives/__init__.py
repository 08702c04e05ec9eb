"""What a step optimises: policy gradient and supervised fine-tuning."""
