"""The catalogue of every metric and span, their set-up, and the dashboards drawn from them."""
