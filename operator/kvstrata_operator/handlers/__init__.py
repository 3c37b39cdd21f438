"""Everything that touches kopf: handlers without logic, and the feed that runs them. Nothing else imports kopf."""
