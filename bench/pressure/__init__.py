"""One node under engines that want more than it has."""
