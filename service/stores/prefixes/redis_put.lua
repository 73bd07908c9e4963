#!lua
-- ARGV: name, bytes, maximum bytes of all entries, ttl_us. Refused when the server is full.
-- Returns the names that were dropped.
forget(ARGV[1])
add(ARGV[1], ARGV[2])
local dropped = drop_expired(tonumber(ARGV[4]))
while total() > tonumber(ARGV[3]) do
  dropped[#dropped + 1] = oldest_of(redis.call('ZRANGE', tenants_key, 0, 0, 'REV')[1])
  forget(dropped[#dropped])
end
return dropped
