"""The `dynafuse` command and what it offers: calibrate, doctor, demo, options."""
