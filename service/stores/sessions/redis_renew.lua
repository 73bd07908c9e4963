#!lua flags=allow-oom
-- ARGV: created_us, fence, holder, lease_us (duration). A full server lets a running turn go on.
local head = read_head()
if not head or not holds_lease(head, ARGV[1], ARGV[2], ARGV[3]) then return {'lease_lost'} end
write_head(head, {lease_us = whole(clock_us() + tonumber(ARGV[4]))})
return answer('ok')
