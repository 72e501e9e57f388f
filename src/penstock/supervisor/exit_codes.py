"""Exit codes of the commands, which the supervisor of member processes reads."""

#: Something failed; trying again may help.
EXIT_FAILED = 1
#: Wrong use: trying again does not help.
EXIT_USAGE = 2
#: No broker answered.
EXIT_CONNECTION = 3
#: Too many threads are in handlers that do not return: a new process goes on where this one cannot.
EXIT_RESTART = 4
