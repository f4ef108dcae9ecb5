"""The web process: HTTP in front, the desk behind. No torch and no GPU in here."""
