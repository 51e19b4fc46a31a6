"""What this machine offers and lacks: devices, packages, drivers."""
