"""Results for people: pictures, files, the names of plans."""
