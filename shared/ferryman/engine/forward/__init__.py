"""One step on the device: from packed integers through the model's forward to drawn tokens."""
