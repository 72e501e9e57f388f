"""Publishing: what handlers return is made into messages and written; then the messages it is for are done."""
