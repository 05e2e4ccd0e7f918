"""What people see of a run: tables on the terminal and the files of its directory."""
