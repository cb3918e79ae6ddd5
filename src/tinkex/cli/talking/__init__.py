"""What `tinkex chat` is made of."""
