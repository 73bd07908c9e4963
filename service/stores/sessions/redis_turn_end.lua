#!lua flags=allow-oom
-- ARGV: created_us, fence, holder, turn_id, status ('' to forget the record), result, ttl_us.
local head = read_head()
if not head then return {'not_found'} end
if not holds_lease(head, ARGV[1], ARGV[2], ARGV[3]) then return {'lease_lost'} end
local now = clock_us()
local turns = read_turns(now)
local turn, position = find_running(turns)
if not turn or turn.id ~= ARGV[4] then return {'ok'} end
local values = close_turn(turn, ARGV[5], ARGV[5] ~= '' and ARGV[6] or nil, now + tonumber(ARGV[7]))
if ARGV[5] == '' then table.remove(turns, position) end
write_head(head, write_turns(head, turns, values))
return answer('ok')
