"""What people read: text and JSON of analyses."""
