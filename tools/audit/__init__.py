"""What the noise really hides: lower bounds of epsilon from the release code itself, beside the ledger's figures."""
