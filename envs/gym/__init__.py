"""Any single Gymnasium env."""
