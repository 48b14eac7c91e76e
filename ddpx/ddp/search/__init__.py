"""``bucket_cap_mb="auto"``: the search of the best bucket plan while the script trains."""
