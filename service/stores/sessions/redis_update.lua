#!lua
-- ARGV: has_metadata, metadata, has_ttl, ttl_us.
local head = read_head()
if not head then return {'not_found'} end
local now = clock_us()
local changes = {updated_us = whole(now)}
if ARGV[1] == '1' then changes.metadata = ARGV[2] end
if ARGV[3] == '1' then changes.ttl_us = ARGV[4] end
changes.expires_us = renewed_expiry(changes.ttl_us or head.ttl_us, now)
write_head(head, changes)
return answer('ok')
