"""What a remote read costs and saves, where the inflection lies, and how sure that is. Pure: numpy in, shapes out."""
