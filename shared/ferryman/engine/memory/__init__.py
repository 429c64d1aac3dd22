"""The memory of slots on the device, and copies between it and the host."""
