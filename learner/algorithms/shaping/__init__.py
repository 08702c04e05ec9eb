"""What is done to rewards before advantages are computed from them, one file each. Together: shape."""
