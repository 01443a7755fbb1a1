"""What the compiler made of a program: its collectives, its memory, its own cost estimates."""
