"""What captured KV tells of the forms that an error permits."""
