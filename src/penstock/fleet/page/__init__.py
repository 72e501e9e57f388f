"""The page: shows reports of groups live in a browser, with the history of half an hour."""
