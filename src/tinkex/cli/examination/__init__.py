"""What the doctor looks at. Nothing here changes anything."""
