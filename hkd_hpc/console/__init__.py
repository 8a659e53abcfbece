"""What people read: lines, tables, warnings, the plan of a dry run."""
