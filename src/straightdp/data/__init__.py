"""Records and where they come from: files, folders, built-in sets, captions, the split, the downloads."""
