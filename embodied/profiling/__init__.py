"""What the parts of a recipe cost on these devices: measured, stored, used by plan, benchmark and placement=auto."""
