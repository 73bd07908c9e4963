#!lua
-- ARGV: name, bytes, most bytes of a tenant, most bytes of all, ttl_us. Refused when the server is full.
-- Returns the names that were dropped.
local name, tenant = ARGV[1], tenant_of(ARGV[1])
forget(name)
add(name, ARGV[2])
local dropped = drop_expired(tonumber(ARGV[5]))
while size_of(tenant) > tonumber(ARGV[3]) do
  dropped[#dropped + 1] = oldest_of(tenant)
  forget(dropped[#dropped])
end
while total() > tonumber(ARGV[4]) do
  dropped[#dropped + 1] = oldest_of(redis.call('ZRANGE', tenants_key, 0, 0, 'REV')[1])
  forget(dropped[#dropped])
end
return dropped
