"""What breaks first when a fleet grows: measured costs of one node and one block, and queues that carry a fleet's."""
