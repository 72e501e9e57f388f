"""Member processes: started, restarted, sent signals, and their output passed on line by line."""
