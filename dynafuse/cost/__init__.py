"""What work costs: devices with their constants, a roofline over them, and what calls of library ops take."""
