"""What people read: lines, tables, warnings, and where they go."""
