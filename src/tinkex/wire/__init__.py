"""What client and server exchange: the endpoints, and the bodies as bytes."""
