"""What a server costs after a long life."""
