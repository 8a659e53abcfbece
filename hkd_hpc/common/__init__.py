"""What everything may use: errors, a parser, how a setting is declared, random streams, torch on first use, a stop."""
