"""The commands of `featcal` for a user's own files, one file each: parse, call one function, print."""
