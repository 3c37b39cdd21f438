"""What a decision is made of: actions and conditions."""
