"""Other people's libraries, timed beside kvjax in processes of their own."""
