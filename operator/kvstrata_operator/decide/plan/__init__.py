"""What a decision is made of: actions, objects that they write, conditions."""
