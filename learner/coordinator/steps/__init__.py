"""What a step trains, who has been told, and the lines that are written of it."""
