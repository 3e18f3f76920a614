"""What operators see: numbers of keepers and of transfers, for Prometheus, torch.monitor and torch's debug server."""
