"""What two ends say to each other, and the routes that bytes take."""
