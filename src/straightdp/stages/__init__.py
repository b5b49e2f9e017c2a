"""The stations of a run. Each takes what earlier ones left, does one thing, and writes its artefact."""
