"""Member processes: started, restarted, told of signals, and their output passed on line by line."""
