"""What people read: text, JSON and HTML of plans and analyses."""
