"""What the core costs on the host: a driver, measurements, and how they are shown."""
