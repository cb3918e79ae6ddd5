"""What travels between the two halves: the endpoints, and the bodies as bytes."""
