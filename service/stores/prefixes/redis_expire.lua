#!lua flags=allow-oom
-- ARGV: ttl_us. Returns the names that were dropped, the longest unused first, some at a time.
return drop_expired(tonumber(ARGV[1]))
