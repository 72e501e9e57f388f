"""Exit codes of the commands, which the supervisor of member processes reads."""

#: Something failed; another try may help.
EXIT_FAILED = 1
#: Wrong use: another try does not help.
EXIT_USAGE = 2
#: No broker answered.
EXIT_CONNECTION = 3
#: Too many threads are in handlers that do not return: a new process can go on.
EXIT_RESTART = 4
