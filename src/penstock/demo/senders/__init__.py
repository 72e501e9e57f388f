"""The airline of the demo: its flights, its own database, and the processes that send in transactions."""
