"""What runs inside worker processes: one class per role, built from lower layers."""
