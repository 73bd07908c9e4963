#!lua flags=no-writes
-- ARGV: "tenant:family:", ttl_us. Returns the names of that family that did not expire.
local oldest = clock_us() - tonumber(ARGV[2])
local found = {}
for _, name in ipairs(redis.call('ZRANGE', names_key, '[' .. ARGV[1], '(' .. ARGV[1] .. 'g', 'BYLEX')) do
  if tonumber(redis.call('ZSCORE', used_key, name) or '0') > oldest then found[#found + 1] = name end
end
return found
